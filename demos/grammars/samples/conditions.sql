SELECT name
FROM products
WHERE NOT (price < 10 OR price > 100)
  AND name LIKE 'A%' AND name NOT LIKE '%old%'
  AND kind IN ('book', 'film') AND maker NOT IN (1, 2, 3)
  AND stock NOT BETWEEN 0 AND 5
