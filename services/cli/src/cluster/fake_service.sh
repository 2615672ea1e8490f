#!/bin/sh
# Stands in for the treespec executable in the tests of the cluster. The folder given by --target has a file
# "behaviour", shell code that says what the service of this role does.

role=$1
arguments=$*
while [ $# -gt 0 ]; do
  if [ "$1" = --target ]; then
    folder=$2
  fi
  shift
done

# What a healthy service does: notes its arguments, announces itself, ends with its stdin.
serve() {
  echo "$arguments" >"$folder/$role.arguments"
  echo "{\"event\":\"listening\",\"endpoint\":\"http://127.0.0.1:1/$role\"}"
  echo '{"event":"loading","done_bytes":1,"total_bytes":2}'
  echo '{"event":"serving"}'
  cat >/dev/null
  touch "$folder/$role.ended"
}

. "$folder/behaviour"
