"""Situations reported in public issue threads, one test each; README.md says where they differ from the reports."""
