"""One persistent stream of declared blocks, and several that decode together."""
