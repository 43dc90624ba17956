SELECT (price + shipping) * (1 - discount / 100) % 7, -price, price - -1, +weight FROM items WHERE a+b*2 <> c AND d != e
