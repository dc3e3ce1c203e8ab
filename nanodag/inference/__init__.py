"""SGLang's wire protocol: messages, client, and the processes of samplers. No torch here."""
