SELECT s.size, k.name FROM sizes s CROSS JOIN kinds k ORDER BY s.size ASC, 2 DESC LIMIT 10 OFFSET 20
