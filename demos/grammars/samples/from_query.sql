SELECT t.city, t.n
FROM (
  SELECT city, COUNT(*) AS n
  FROM customers
  GROUP BY city
) AS t
WHERE t.n > (SELECT AVG(n) FROM city_sizes)
