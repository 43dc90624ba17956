SELECT city, COUNT(*), AVG(age), MAX(age) - MIN(age) AS span
FROM customers
GROUP BY city
HAVING COUNT(*) > 10 AND AVG(age) BETWEEN 20 AND 40
ORDER BY COUNT(*) DESC, city
LIMIT 5;
