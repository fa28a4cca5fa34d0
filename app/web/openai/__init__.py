"""OpenAI's API over the same sessions: chat completions, models, embeddings, and errors in its shape."""
