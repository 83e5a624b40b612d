"""Speed and memory of models: engine, update, weight transfer, and the products inside."""
