"""From what users write (JSON schema, regex, Lark, GBNF, choices) to grammars of llguidance."""
