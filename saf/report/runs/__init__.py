"""Pages, pictures and tables about training runs."""
