"""Callbacks for other training loops than Lightning's; each module imports the library it is for."""
