SELECT name
FROM products
WHERE NOT EXISTS (SELECT 1 FROM items WHERE items.product_id = products.id)
ORDER BY name;
