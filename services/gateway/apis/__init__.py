"""Endpoints: OpenAI's completions, chat and Responses, Anthropic's Messages, tokens, tenants, probes."""
