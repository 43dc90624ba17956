SELECT "order"."group", "say ""hi""" FROM "order" WHERE "order"."from" = 'x'
