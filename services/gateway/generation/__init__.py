"""From a parsed request to its last token: preparation, the machine's host, answers, timing. Knows no API."""
