"""Models of transformers over our pool: its layers with our attention, products, norms and experts."""
