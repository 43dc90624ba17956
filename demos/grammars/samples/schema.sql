SELECT p.id FROM shop.products p WHERE (SELECT COUNT(*) FROM shop.sales s WHERE s.product = p.id) = 0
