SELECT CAST(price AS INTEGER), CAST(id AS varchar(20)), CAST('1' || '2' AS NUMERIC(10)) FROM products
