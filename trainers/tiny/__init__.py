"""Making of the embedded tiny model."""
