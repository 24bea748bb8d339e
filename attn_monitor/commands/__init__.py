"""What the command line can do, a file each. Nothing heavy is imported before a command needs it."""
