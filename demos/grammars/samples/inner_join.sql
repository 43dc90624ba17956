SELECT o.id, c.name
FROM orders o
  INNER JOIN customers c ON c.id = o.customer_id AND c.active = 1
  JOIN items USING (order_id, shop_id);
