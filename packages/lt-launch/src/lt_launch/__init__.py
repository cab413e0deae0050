"""The `lt` command line. Importing this package loads no command."""
