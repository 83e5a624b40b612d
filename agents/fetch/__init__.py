"""Downloads of models: from the hub and from registry packages, and the folders that hold them."""
