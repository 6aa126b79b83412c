-- The server's clock. A script, because in a cluster a plain TIME does not say which node should answer.
-- KEYS: events (any key of the model)       Returns microseconds since the epoch, as text.
local now = redis.call('TIME')
return string.format('%.0f', tonumber(now[1]) * 1000000 + tonumber(now[2]))
