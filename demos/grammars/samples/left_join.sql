SELECT c.name, o.total
FROM customers c
LEFT JOIN orders o ON o.customer_id = c.id
LEFT OUTER JOIN payments p ON p.order_id = o.id
WHERE o.id IS NULL OR p.paid < o.total
