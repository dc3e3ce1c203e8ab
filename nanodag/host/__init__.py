"""This machine: processor, ports, files, folders, and how long a process is waited for. No torch here."""
