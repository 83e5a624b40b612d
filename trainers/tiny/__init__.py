"""Training of the embedded tiny model from random weights."""
