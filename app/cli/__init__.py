"""The command line: talks to a running server over HTTP, or to the data folder itself."""
