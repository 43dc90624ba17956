SELECT COUNT(DISTINCT customer_id) FROM orders WHERE placed >= '2024-01-01'
