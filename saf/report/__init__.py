"""One self-contained page about one or several runs, and a static picture for documents."""
