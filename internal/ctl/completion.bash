# bash completion for boxedctl: source <(boxedctl completion bash)
_boxedctl() {
	local IFS=$'\n' words=("${COMP_WORDS[@]:1:COMP_CWORD}")
	# Bash splits words at "=": join --flag = value again, as boxedctl reads it.
	if [[ ${COMP_WORDS[COMP_CWORD]} == "=" ]]; then
		words[${#words[@]} - 1]=""
	elif [[ ${COMP_WORDS[COMP_CWORD - 1]} == "=" ]]; then
		unset "words[${#words[@]}-2]"
		words=("${words[@]}")
	fi
	# shellcheck disable=SC2207 # no mapfile in the bash of macOS; words are one a line
	COMPREPLY=($("${COMP_WORDS[0]}" __complete "${words[@]}" 2>/dev/null))
}
complete -o default -F _boxedctl boxedctl
