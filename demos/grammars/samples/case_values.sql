SELECT name, CASE kind WHEN 1 THEN 'book' WHEN 2 THEN 'film' ELSE 'other' END AS kind FROM products
