"""Invoices as text."""

RATES = {"DE": 0.19, "FR": 0.2, "AT": 0.2}
DISCOUNTS = ((1000, 0.1), (500, 0.05))


def render(order):
    """The invoice of `order`: {"customer", "country", "items": [{"name", "price", "count"}]}."""
    amounts = [cents(item["price"] * item["count"]) for item in order["items"]]
    items = [item_row(item, amount) for item, amount in zip(order["items"], amounts, strict=True)]
    discount = discount_of(sum(amounts))
    net = sum(amounts) - (discount or 0)
    tax, tax_row = taxed(net, order["country"])
    lines = [f"Invoice for {order['customer']}", "", *items]
    if discount is not None:
        lines.append(row("Discount", -discount))
    return "\n".join([*lines, tax_row, row("Total", net + tax)]) + "\n"


def cents(amount):
    return round(amount * 100) / 100


def item_row(item, amount):
    return f"{item['count']:>3} x {item['name']:<20} {amount:>10.2f}"


def row(name, amount):
    return f"{name:<26} {amount:>10.2f}"


def discount_of(subtotal):
    """None below the least amount that has one."""
    for least, part in DISCOUNTS:
        if subtotal >= least:
            return cents(subtotal * part)
    return None


def taxed(net, country):
    """The tax, and its line."""
    if country not in RATES:
        return 0, "No tax: delivery abroad"
    tax = cents(net * RATES[country])
    return tax, row("Tax", tax)
