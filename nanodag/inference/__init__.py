"""SGLang's wire protocol: messages, client, and the processes of samplers and router. No torch here."""
