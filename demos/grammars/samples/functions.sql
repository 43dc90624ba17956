SELECT UPPER(SUBSTR(name, 1, 1)) || LOWER(SUBSTR(name, 2)), COALESCE(phone, mobile, 'none'), ROUND(price, 2), NOW() FROM contacts
