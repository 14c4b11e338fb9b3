"""Visual retrieval-augmented agents over collections of page images: run them, train them, compare them."""
