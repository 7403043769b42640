CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT NOT NULL, price_cents INTEGER NOT NULL);
CREATE TABLE orders (
    id INTEGER PRIMARY KEY,
    customer_id INTEGER NOT NULL REFERENCES customers (id),
    ordered_on TEXT NOT NULL, -- YYYY-MM-DD
    status TEXT NOT NULL      -- open, paid or cancelled
);
CREATE TABLE items (
    order_id INTEGER NOT NULL REFERENCES orders (id),
    product_id INTEGER REFERENCES products (id), -- NULL: a free gift
    quantity INTEGER NOT NULL,
    price_cents INTEGER NOT NULL -- as it was when it was ordered
);
