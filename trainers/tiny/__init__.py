"""How the embedded tiny model is made."""
