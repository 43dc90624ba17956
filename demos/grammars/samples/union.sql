SELECT name FROM customers UNION SELECT name FROM suppliers ORDER BY name
