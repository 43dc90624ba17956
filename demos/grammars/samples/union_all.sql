SELECT id, 'order' AS what FROM orders
UNION ALL
SELECT id, 'return' FROM returns
UNION ALL
SELECT ALL id, what FROM archive
LIMIT 100
