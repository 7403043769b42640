SELECT customers.name, SUM(items.quantity * items.price_cents) AS revenue_cents
FROM customers
JOIN orders ON orders.customer_id = customers.id
JOIN items ON items.order_id = orders.id
WHERE orders.status = 'paid' AND orders.ordered_on BETWEEN '2025-01-01' AND '2025-12-31'
GROUP BY customers.id
ORDER BY revenue_cents DESC, customers.name
LIMIT 3;
