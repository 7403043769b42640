-- Calls for wrk: every request is a body of its own, sent to the next of the sessions.
-- Arguments: file of "path<TAB>key" lines; file before and file after the number in the body; first number.

local number_of_threads = 0

function setup(thread)
   thread:set("thread_number", number_of_threads)
   number_of_threads = number_of_threads + 1
end

local function content(path)
   local file = assert(io.open(path, "rb"))
   local text = file:read("*a")
   file:close()
   return text
end

function init(args)
   targets = {}
   for line in io.lines(args[1]) do
      local path, key = line:match("([^\t]*)\t(.*)")
      targets[#targets + 1] = { path = path, headers = { ["Content-Type"] = "application/json", ["Authorization"] = "Bearer " .. key } }
   end
   before, after, counter = content(args[2]), content(args[3]), tonumber(args[4])
end

function request()
   counter = counter + 1
   local target = targets[counter % #targets + 1]
   return wrk.format("POST", target.path, target.headers, before .. thread_number .. "-" .. counter .. after)
end

function done(summary, latency, requests)
   local e = summary.errors
   io.write(string.format(
      '\nRESULT {"calls": %d, "seconds": %.6f, "p50_ms": %.4f, "p90_ms": %.4f, "p99_ms": %.4f, "bytes": %d, ' ..
      '"refused": %d, "broken": %d, "timeouts": %d}\n',
      summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(90) / 1e3,
      latency:percentile(99) / 1e3, summary.bytes, e.status, e.connect + e.read + e.write, e.timeout))
end
