"""Invoices as text."""


def render(order):
    """The invoice of `order`: {"customer", "country", "items": [{"name", "price", "count"}]}."""
    lines = []
    lines.append("Invoice for " + order["customer"])
    lines.append("")
    subtotal = 0
    for item in order["items"]:
        amount = item["price"] * item["count"]
        amount = round(amount * 100) / 100
        subtotal = subtotal + amount
        lines.append(f"{item['count']:>3} x {item['name']:<20} {amount:>10.2f}")
    discount = 0
    if subtotal >= 1000:
        discount = subtotal * 0.1
        discount = round(discount * 100) / 100
        lines.append(f"{'Discount':<26} {-discount:>10.2f}")
    elif subtotal >= 500:
        discount = subtotal * 0.05
        discount = round(discount * 100) / 100
        lines.append(f"{'Discount':<26} {-discount:>10.2f}")
    net = subtotal - discount
    rates = {"DE": 0.19, "FR": 0.2, "AT": 0.2}
    if order["country"] in rates:
        tax = round(net * rates[order["country"]] * 100) / 100
        lines.append(f"{'Tax':<26} {tax:>10.2f}")
    else:
        tax = 0
        lines.append("No tax: delivery abroad")
    lines.append(f"{'Total':<26} {net + tax:>10.2f}")
    return "\n".join(lines) + "\n"
