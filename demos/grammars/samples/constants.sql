SELECT 1, -2.5e3, .5, 'it''s', NULL, TRUE, 'a' || 'b' AS joined
