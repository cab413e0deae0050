"""The lt command, which finds the commands of every installed lt package."""
