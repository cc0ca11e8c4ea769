"""Everything that names a vLLM type. Only this package imports vLLM."""
