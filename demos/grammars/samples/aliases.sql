SELECT c.name AS customer, c.city town, o.total * 1.19 AS "total with tax"
FROM customers AS c, orders o
WHERE c.id = o.customer_id;
