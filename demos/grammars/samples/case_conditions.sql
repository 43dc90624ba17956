SELECT CASE
    WHEN age < 18 THEN 'young'
    WHEN age < 65 AND working = 1 THEN 'working'
    ELSE NULL
  END AS life, SUM(CASE WHEN age >= 18 THEN 1 END)
FROM people
GROUP BY 1
