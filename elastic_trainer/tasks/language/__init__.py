"""Language models: texts, tokens, a GPT."""
