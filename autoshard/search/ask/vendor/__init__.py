"""What vendors document: layouts as answers, and the length and batch of a question that leaves them open."""
