"""One module per wire dialect: parse a request, render a reply, render a stream, shape an error."""
