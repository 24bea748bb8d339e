"""What of the documentation is written by the code: `python -m tests.docs_pages` writes it anew."""
