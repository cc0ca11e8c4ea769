"""Moving traffic from one OpenAI server to another: the proxy's configuration, measurements, judgement."""
