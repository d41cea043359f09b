#compdef boxedctl
# zsh completion for boxedctl: put it into a directory of $fpath as _boxedctl, or source it.
_boxedctl() {
	local -a candidates
	candidates=("${(@f)$("${words[1]}" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
	candidates=("${(@)candidates:#}")
	if ((${#candidates})); then
		compadd -a candidates
	else
		_files
	fi
}
if [[ $funcstack[1] == _boxedctl ]]; then
	_boxedctl "$@"
else
	compdef _boxedctl boxedctl
fi
